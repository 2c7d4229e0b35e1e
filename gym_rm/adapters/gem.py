"""GEM: one conversation as its single environment, whose observations are texts."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from gym_rm.adapters import require

Env: Any = require("gem.core", install="gem-llm").Env


class RewardModelGemEnv(Env):  # type: ignore[misc]
    """`gem.register("gym_rm:reward-model", "gym_rm.adapters.gem:RewardModelGemEnv")`.

    An observation is what the user said last; after the end of an episode it is empty.

    Args:
        seed: of the first reset that comes without one; `gem.make_vec` gives a different one to each environment.
        settings: of the single `RewardModel-v0`: `reward_model`, `prompts`, `max_turns`, ...
    """

    def __init__(self, seed: int | None = None, **settings: Any) -> None:
        super().__init__()
        self._env = gym.make("RewardModel-v0", **settings)
        self._first_seed = seed

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start the next episode."""
        seed = self._first_seed if seed is None else seed
        self._first_seed = None
        super().reset(seed)
        conversation, info = self._env.reset(seed=seed)
        return conversation[-1]["content"], info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Append a reply; raises what the environment raises."""
        conversation, reward, terminated, truncated, info = self._env.step(action)
        said = "" if terminated or truncated else conversation[-1]["content"]
        return said, float(reward), terminated, truncated, info

    def sample_random_action(self) -> str:
        """A text from the action space."""
        return str(self._env.action_space.sample())
