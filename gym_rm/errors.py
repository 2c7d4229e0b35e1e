"""Exceptions of the package, and a function that logs each warning once."""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gym_rm.scores import Scores

logger = logging.getLogger("gym_rm")


class GymRMError(Exception):
    """Base class of all exceptions of gym_rm."""


class ConfigError(GymRMError, ValueError):
    """Invalid setting. The message has the expected value, the given value, and what to do."""


class RenderModeError(ConfigError, TypeError):
    """Unknown render mode. It is also a TypeError, because Stable-Baselines3 tries `rgb_array` and expects one."""


class ActionError(GymRMError, ValueError):
    """Invalid reply. The environment has not changed."""


class ConversationError(GymRMError, ValueError):
    """Conversation that the scorer cannot read: invalid, too long, or rejected by the chat template."""


class RemoteError(GymRMError, ConnectionError):
    """Failure of a scorer in another process or on another host."""


class ScoringError(GymRMError, ValueError):
    """Some conversations have no score. The error contains the scores of the others.

    Attributes:
        scores: `Scores` of the whole call. Failed rows have the reward NaN and an error message.
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
    """Return `" Did you mean 'x'?"` for the most similar known name, or an empty string if none is similar."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, but each message only once per process."""
    logger.warning(message)
