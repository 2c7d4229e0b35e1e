"""GEM: a single conversation as a `gem.core.Env` with text observations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from gym_rm.adapters import require
from gym_rm.scorers.batching import shared_batching_scorer

Env: Any = require("gem.core", install="gem-llm").Env


class RewardModelGemEnv(Env):  # type: ignore[misc]
    """One `RewardModel-v0` conversation as a GEM environment.

    Register it with `gem.register("gym_rm:reward-model", "gym_rm.adapters.gem:RewardModelGemEnv")`. An observation is
    the last user message, or an empty text after the end of an episode. All environments of a process with equal
    settings share one reward model, which merges the calls of concurrent steps into one batch.

    Args:
        seed: seed of the first `reset` if that call has none; `gem.make_vec` passes a different seed to each
            environment.
        settings: keywords of the single `RewardModel-v0` (`reward_model`, `prompts`, `max_turns`, ...).
    """

    def __init__(self, seed: int | None = None, **settings: Any) -> None:
        super().__init__()
        scorer = shared_batching_scorer(settings.pop("reward_model", None), settings.pop("reward_model_kwargs", {}))
        self._env = gym.make("RewardModel-v0", reward_model=scorer, **settings)
        self._first_seed = seed

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start the next episode and return the user's message and the info."""
        seed = self._first_seed if seed is None else seed
        self._first_seed = None
        super().reset(seed)
        conversation, info = self._env.reset(seed=seed)
        return conversation[-1]["content"], info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Append a reply and score it; raises the same errors as `RewardModel-v0`."""
        conversation, reward, terminated, truncated, info = self._env.step(action)
        user_message = "" if terminated or truncated else conversation[-1]["content"]
        return user_message, float(reward), terminated, truncated, info

    def sample_random_action(self) -> str:
        """Return a random text from the action space."""
        return str(self._env.action_space.sample())
