"""Whether a server gives known conversations their known rewards, and why not."""

from __future__ import annotations

from collections.abc import Sequence

from gym_rm.errors import ConfigError, logger
from gym_rm.types import Conversation

UNKNOWN_REWARDS: tuple[Conversation, ...] = (
    ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "2 + 2 is 4."}),
    ({"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is five, I think."}),
)
"""Conversations that are scored at the start if no rewards are known."""


TOLERANCE = 0.01
"""Largest difference from the rewards that a server says it gives, relative to the largest of them."""


def compare(url: str, rewards: Sequence[float], known: Sequence[tuple[Conversation, float]]) -> None:
    """Raise ConfigError with both numbers and likely causes if a reward differs from the one of `/info`."""
    expected = [reward for _, reward in known]
    allowed = TOLERANCE * max(map(abs, expected)) + 1e-6
    row = max(range(len(known)), key=lambda k: abs(rewards[k] - expected[k]))
    if abs(rewards[row] - expected[row]) <= allowed:
        return
    text = str(known[row][0][-1]["content"])
    raise ConfigError(
        f"{url} gives other rewards than its /info says: {rewards[row]:.6g} instead of {expected[row]:.6g} for the "
        f"conversation that ends with {text[-60:]!r}. It may apply an activation, or something between changes "
        "conversations or rewards, or another server is at this URL."
    )


def suspect_activation(url: str, rewards: Sequence[float]) -> None:
    """Report rewards that look like the output of an activation, for servers without known rewards."""
    if all(reward == 1.0 for reward in rewards):
        raise ConfigError(f"{url} gives every conversation the reward 1: it applies a softmax to one value.")
    if all(0 < reward < 1 for reward in rewards):
        shown = ", ".join(f"{reward:.4g}" for reward in rewards)
        logger.warning("%s gives rewards between 0 and 1 (%s): it may apply a sigmoid.", url, shown)
