"""One exception per boundary that a failure can cross, and one way to warn."""

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
    """Base of every error that gym_rm raises on purpose."""


class ConfigError(GymRMError, ValueError):
    """An invalid setting: says what was expected, what came, and what to do."""


class RenderModeError(ConfigError, TypeError):
    """An unknown render mode. Stable-Baselines3 probes for `rgb_array` and expects a `TypeError`."""


class ActionError(GymRMError, ValueError):
    """An invalid reply; the environment has not changed."""


class ConversationError(GymRMError, ValueError):
    """A conversation that this scorer cannot read: malformed, too long, or refused by the chat template."""


class RemoteError(GymRMError, ConnectionError):
    """A scorer in another process or on another host failed to answer."""


class ScoringError(GymRMError, ValueError):
    """Some conversations have no score; the scores of the others are kept.

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
