"""OpenEnv: a single conversation as an `Environment` for OpenEnv's server."""

from __future__ import annotations

import uuid
from typing import Any

import gymnasium as gym
from pydantic import Field

from gym_rm.adapters import require
from gym_rm.types import Message

interfaces = require("openenv.core.env_server.interfaces", install="openenv-core")
types = require("openenv.core.env_server.types", install="openenv-core")
Environment: Any = interfaces.Environment
Action: Any = types.Action
Observation: Any = types.Observation


class ReplyAction(Action):  # type: ignore[misc]
    """The action: a reply of the assistant."""

    reply: str


class ConversationObservation(Observation):  # type: ignore[misc]
    """The observation: the conversation so far. OpenEnv defines `done`, `reward` and `metadata`."""

    messages: list[dict[str, str]] = Field(default_factory=list)


class RewardModelOpenEnv(Environment):  # type: ignore[misc]
    """One `RewardModel-v0` conversation as an OpenEnv environment.

    Serve it with `create_app(RewardModelOpenEnv, ReplyAction, ConversationObservation)`.

    Args:
        settings: keywords of the single `RewardModel-v0` (`reward_model`, `prompts`, `max_turns`, ...).
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._env = gym.make("RewardModel-v0", **settings)
        self._state = types.State(episode_id=None, step_count=0)
        self._over = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> ConversationObservation:
        """Start the next episode and return its first observation."""
        conversation, info = self._env.reset(seed=seed)
        self._state = types.State(episode_id=episode_id or uuid.uuid4().hex, step_count=0)
        self._over = False
        return self._observation(conversation, info, reward=None)

    def step(self, action: ReplyAction, timeout_s: float | None = None, **kwargs: Any) -> ConversationObservation:
        """Append a reply and score it; raises the same errors as `RewardModel-v0`."""
        conversation, reward, terminated, truncated, info = self._env.step(action.reply)
        self._state.step_count += 1
        self._over = terminated or truncated
        return self._observation(conversation, {**info, "truncated": truncated}, reward=float(reward))

    @property
    def state(self) -> Any:
        """Id of the episode and its number of replies so far."""
        return self._state

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _observation(
        self, conversation: list[Message], info: dict[str, Any], *, reward: float | None
    ) -> ConversationObservation:
        messages = [dict(message) for message in conversation]
        return ConversationObservation(messages=messages, reward=reward, done=self._over, metadata=info)
